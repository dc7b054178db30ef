-- Words of a session's names; a search word matches as a prefix.
CREATE VIRTUAL TABLE session_names USING fts5 (names, tokenize = 'unicode61 remove_diacritics 2', prefix = '2 3');
