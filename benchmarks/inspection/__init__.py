"""Items that differ from good ones, seen by one to four cameras: rendered, scored, compared."""
