"""The chaos driver: random schedules of faults against real processes on a real broker, see README.md."""
