"""What any part of a process needs: forks, the thread that owns a manager, news, rate limits.  Imports the errors only."""
