"""Files of prompts to files of answers, through the scheduler; killed at any point, a job goes on where it was."""
