TRUNCATE message_words;
INSERT INTO unindexed (message) SELECT id FROM messages ON CONFLICT DO NOTHING;

-- While replicas are replaced, the version before this one indexes without that word.
-- ("OR REPLACE", because a statement that begins with the words CREATE TRIGGER ends elsewhere for SQLite, by which these
-- statements are told apart.)
CREATE FUNCTION in_blocks() RETURNS trigger LANGUAGE plpgsql AS '
BEGIN
  NEW.vector := NEW.vector || array_to_tsvector(ARRAY[''~w'' || NEW.rowid / 65536]);
  RETURN NEW;
END';
CREATE OR REPLACE TRIGGER in_blocks BEFORE INSERT ON message_words FOR EACH ROW EXECUTE FUNCTION in_blocks();
