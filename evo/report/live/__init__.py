"""Live pages: the runs of a database and their reports, served on this machine while searches go on."""
