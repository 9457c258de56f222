-- ARGV  lease, what it would take, what the backend may hold.
-- Returns 0 and takes it; or the number of the counter that is full; or -1 if it was given back already.

local lease = ARGV[OWN_ARGUMENTS]
local claim = arguments(OWN_ARGUMENTS + 1)

check()
if is_gone(lease) then
    return finish(-1)
end
if is_held(lease) then
    extend(lease)
    return finish(0)
end
reclaim()
local wanted, sum = numbers(claim), sum_of('*')
for i = 1, COUNTERS do
    local most = tonumber(ARGV[OWN_ARGUMENTS + COUNTERS + i])
    if wanted[i] > 0 and sum[i + 1] + wanted[i] > most then
        return finish(i)
    end
end
add(lease, claim)
return finish(0)
