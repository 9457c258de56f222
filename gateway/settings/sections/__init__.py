"""The sections of a configuration file, one model each, one documented field per key."""
