-- Words of a session's names; a search word matches as a prefix.
CREATE TABLE session_names (rowid BIGINT PRIMARY KEY, names TSVECTOR NOT NULL);
CREATE INDEX session_names_words ON session_names USING gin (names);
