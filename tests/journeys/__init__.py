"""What a person types during a working day, command by command, and the last lines they read."""
