"""Policies that answer requests: loading and acting (policy.py), and a websocket server of openpi's protocol."""
