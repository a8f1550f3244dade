"""Speech to text: audio files, windows of them, and what a model of Whisper's kind hears in each."""
