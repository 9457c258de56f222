-- KEYS  1  tag
-- ARGV  type, subject, owner

announce(KEYS[1], unpack(ARGV))
