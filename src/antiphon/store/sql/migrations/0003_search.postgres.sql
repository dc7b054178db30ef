-- The words of messages, by messages.id, and beside them in the same vector who may find them (see store/words.py).
-- The text is stored once more, cut and on one line: a snippet is made of it.
CREATE TABLE message_words (rowid BIGINT PRIMARY KEY, words TEXT NOT NULL, vector TSVECTOR NOT NULL);
CREATE INDEX message_words_vector ON message_words USING gin (vector);
-- What was appended and is not in there yet.
CREATE TABLE unindexed (message BIGINT PRIMARY KEY);
