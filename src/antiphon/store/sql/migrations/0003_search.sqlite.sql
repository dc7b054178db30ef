-- The words of messages, by messages.id. The text is stored once more, cut and on one line: then removing an entry
-- needs nothing but its number, and a snippet cannot disagree with the index.
-- `scope` says in words of our own who may find it: its session (s<id>), that session's ancestors (b<id>, for what was
-- spawned below them), its agent (a<hex>), and whether it was said or is a tool's result. The index then passes over
-- what a caller may not see, a million entries of it, without reading any.
CREATE VIRTUAL TABLE message_words USING fts5 (
  words, scope, tokenize = 'unicode61 remove_diacritics 2', prefix = '3', columnsize = 0
);
-- Its terms in their order, to find the words that begin with some letters.
CREATE VIRTUAL TABLE message_words_terms USING fts5vocab (message_words, instance);
