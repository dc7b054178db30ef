"""Sessions: resolving and authorizing references, rows, transcripts, search and retention."""
