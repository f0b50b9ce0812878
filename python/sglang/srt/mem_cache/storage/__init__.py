"""The tiers below the host's memory: one file per store behind the protocol `BlockStore`."""
