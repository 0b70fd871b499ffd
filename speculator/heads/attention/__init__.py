"""What heads with attention layers share: EAGLE-3, DSpark and MTP."""
