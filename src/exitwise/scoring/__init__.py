"""Large scoring jobs: shards of images, scored by many processes, committed exactly once and resumable. No torch."""
