-- ARGV  id. Cancels a batch, or refuses it if it arrives later, as job_revoke.lua does. Returns whether it had been
--       accepted.

local id = ARGV[OWN_ARGUMENTS]

insist(TAG)
if cancel_batch(id) then
    return 1
end
redis.call('SET', key('revoked', id), '', 'PX', REVOKED_MS)
return 0
