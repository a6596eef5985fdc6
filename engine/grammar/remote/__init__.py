"""Grammar processes as the daemon sees them: started, asked, bounded in time, replaced."""
