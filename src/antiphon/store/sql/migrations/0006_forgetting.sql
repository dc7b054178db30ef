-- What is needed to forget: the words of a session that is deleted, and rows that nobody will ask for any more.

CREATE INDEX exchanges_by_target ON exchanges (target);
CREATE INDEX exchanges_by_requester ON exchanges (requester) WHERE requester IS NOT NULL;
CREATE INDEX deliveries_by_session ON deliveries (session);

CREATE INDEX exchanges_settled ON exchanges (settled_at) WHERE settled_at IS NOT NULL;
CREATE INDEX tasks_settled ON tasks (settled_at) WHERE settled_at IS NOT NULL;
CREATE INDEX deliveries_over ON deliveries (settled_at) WHERE state IN ('delivered', 'blocked');
CREATE INDEX chains_by_age ON chains (created_at);
CREATE INDEX commands_by_age ON commands (created_at);

-- Most deliveries got there, and those are the only ones that are many: the others are counted.
CREATE INDEX deliveries_elsewhere ON deliveries (state) WHERE state <> 'delivered';
