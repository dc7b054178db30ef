"""The directories agents work in: guarded file access, exact edits and patches."""
