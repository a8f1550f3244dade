"""Files of prompts to files of answers, through the scheduler. A job that was killed resumes where it was."""
