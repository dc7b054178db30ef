-- oldest: 8
-- What a request set for its own run (model settings, client-side tools, earlier messages), as JSON.

ALTER TABLE runs ADD COLUMN options TEXT;
