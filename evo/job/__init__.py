"""One search: the job as it is asked for, and the run, the database and the workers that it becomes."""
