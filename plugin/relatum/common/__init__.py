"""What all subsystems share: ids, limits, checks of arguments, headers, forks, deadlines and threads."""
