"""The GPU back end: the tasks as a ManiSkill environment, stepped many at once. Needs torch and mani_skill."""
