"""The Responses API in terms of chat completions: requests and items in, a response and its events out. Pure.

No backend has to know the API: what reaches one is a chat request, and what comes back is read here.
"""
