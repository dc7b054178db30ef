DROP TABLE message_words_terms;
DROP TABLE message_words;
CREATE VIRTUAL TABLE message_words USING fts5 (
  words, scope, tokenize = 'unicode61 remove_diacritics 2', prefix = '3', columnsize = 0
);
CREATE VIRTUAL TABLE message_words_terms USING fts5vocab (message_words, instance);
