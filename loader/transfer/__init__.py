"""From files to a device."""
