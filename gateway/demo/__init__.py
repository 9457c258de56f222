"""The demo: a simulated fleet, the real gateway, a real client, and a view of what goes where and why."""
