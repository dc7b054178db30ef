-- oldest: 8
-- The version of a file that a session has read or written. A write of another version is refused, and a write that was
-- cut off is recognised by its call.

CREATE TABLE file_versions (
  session     BIGINT NOT NULL,
  path        TEXT   NOT NULL, -- absolute
  seen        TEXT,            -- SHA-256 of the content it has read
  written     TEXT,            -- SHA-256 of the content it has written, or was about to
  call        TEXT,            -- the key of the tool call that wrote it
  updated_at  BIGINT NOT NULL,
  PRIMARY KEY (session, path)
);
CREATE INDEX file_versions_oldest ON file_versions (session, updated_at);
