"""Translation between the Responses API and chat completions. Pure.

Requests and items are translated to chat requests, and chat answers to responses and their events. Backends
need not support the API.
"""
