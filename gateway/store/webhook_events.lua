-- KEYS  1  tag
-- ARGV  how many at most
-- Returns events that are to be handed on, oldest first; and makes sure that there will be more.

insist(KEYS[1])
redis.call('SET', KEYS[1] .. ':webhooks:wanted', 1, 'PX', WEBHOOKS_KEEP_MS)
return redis.call('XRANGE', KEYS[1] .. ':webhooks:events', '-', '+', 'COUNT', ARGV[1])
