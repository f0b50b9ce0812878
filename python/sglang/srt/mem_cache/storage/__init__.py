"""The tiers below the host's memory (L3 on disk): one file per store behind the protocol `BlockStore`."""
