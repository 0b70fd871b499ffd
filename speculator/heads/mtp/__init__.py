"""Multi-token prediction (MTP): the head that many models ship."""
