"""What it costs to be in the middle: CPU, delay and memory, with nginx and routers beside it.

python -m benchmarks.overhead           docs/performance.md explains the tables
"""
