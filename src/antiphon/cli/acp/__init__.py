"""`antiphon acp`: agents of a running gateway as an ACP agent, for editors."""
