-- KEYS  1  replicas  ZSET  owner -> when it counts as gone, in ms of this server's clock
-- ARGV  1  owner, 2  ttl in ms; 0 to leave
-- Returns how many gateway processes there are.

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZADD', KEYS[1], now + ARGV[2], ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
redis.call('PEXPIREAT', KEYS[1], now + 2 * ARGV[2] + 1)
return redis.call('ZCARD', KEYS[1])
