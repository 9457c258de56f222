-- ARGV  id. Deletes a job, or refuses it if it arrives later: a submission whose outcome is unknown may still be in a
--       connection. Returns whether it had been accepted.

local id = ARGV[OWN_ARGUMENTS]
local job = load(id)

insist(TAG)
if job then
    delete(job)
    return 1
end
redis.call('SET', key('revoked', id), '', 'PX', REVOKED_MS)
return 0
