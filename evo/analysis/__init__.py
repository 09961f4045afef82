"""Questions to the lineage: one question a file, one frozen record an answer."""
