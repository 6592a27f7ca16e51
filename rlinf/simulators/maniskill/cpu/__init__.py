"""The CPU back end: one world at a time on SAPIEN's CPU physics, and the renderer that a process's worlds share."""
