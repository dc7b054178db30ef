-- oldest: 8
-- What a waiting run's reply is for names the shared session by its new key, too.

UPDATE runs SET target = replace(replace(target, '"sessionKey":"global"', '"sessionKey":"main"'),
                                 '{"to":"global"', '{"to":"main"')
WHERE state IN ('queued', 'running') AND target LIKE '%"global"%';
