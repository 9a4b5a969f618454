"""The broker's side: settings, connections, key names, messages, codec, atomic transitions, the embedded server,
inspection.
"""

from .settings import BrokerSettings

__all__ = ["BrokerSettings"]
