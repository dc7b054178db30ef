-- name: find
SELECT * FROM pairings WHERE channel = :channel AND account = :account AND sender = :sender;

-- name: is_approved
SELECT is_owner FROM pairings
WHERE channel = :channel AND account = :account AND sender = :sender AND state = 'approved';

-- name: count_pending
SELECT count(*) AS pending FROM pairings
WHERE channel = :channel AND account = :account AND state = 'pending' AND expires_at > :now;

-- name: delete_expired
DELETE FROM pairings WHERE state = 'pending' AND expires_at <= :now;

-- name: insert_request
INSERT INTO pairings (channel, account, sender, name, state, code, requested_at, expires_at)
VALUES (:channel, :account, :sender, :name, 'pending', :code, :now, :expires_at)
ON CONFLICT (channel, account, sender) DO NOTHING;

-- name: by_code
SELECT * FROM pairings
WHERE channel = :channel AND account = :account AND state = 'pending' AND code = :code AND expires_at > :now;

-- name: has_owner
SELECT 1 AS found FROM pairings WHERE channel = :channel AND account = :account AND is_owner = 1 LIMIT 1;

-- name: approve
UPDATE pairings SET state = 'approved', code = NULL, expires_at = NULL, approved_at = :now, is_owner = :is_owner
WHERE channel = :channel AND account = :account AND sender = :sender AND state = 'pending';

-- name: revoke
DELETE FROM pairings WHERE channel = :channel AND account = :account AND sender = :sender;

-- name: list_all
SELECT * FROM pairings WHERE state = 'approved' OR expires_at > :now
ORDER BY channel, account, state DESC, requested_at LIMIT 1000;

-- name: lock
SELECT wrong_codes, locked_until FROM channel_accounts WHERE channel = :channel AND account = :account;

-- name: set_wrong_codes
INSERT INTO channel_accounts (channel, account, wrong_codes, locked_until)
VALUES (:channel, :account, :wrong_codes, :locked_until)
ON CONFLICT (channel, account) DO UPDATE
  SET wrong_codes = excluded.wrong_codes, locked_until = excluded.locked_until;
