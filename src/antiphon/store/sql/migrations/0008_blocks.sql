-- Every indexed message has a word for the block of messages that it is in, so that a search can look through one after
-- the other. What was indexed without is indexed again, behind the cursor as ever.
UPDATE search_cursor SET message = 0;
