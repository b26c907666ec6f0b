// Sums of numbers in chunks, and of chunks in pairs: what Inductor's kernels call by these names.

#include <cstdint>
#include <vector>

namespace autosched {

template <typename T, uint64_t kChunkSize>
struct CascadeSumHelper {
  explicit CascadeSumHelper(uint64_t most) : has_chunks(most > kChunkSize) {}

  // The end of a chunk: add the sums of as many numbers as this one contains, while there are some.
  void carry() {
    T carried = sum;
    uint64_t level = 0;
    for (uint64_t ended = chunks++; ended & 1; ended >>= 1) carried = sums[level++] + carried;
    if (level == sums.size()) sums.push_back(carried);
    sums[level] = carried;
    sum = T(0);
    count = 0;
  }

  T sum{0};  // of the present chunk: a member, so it can be in a register
  bool has_chunks;
  uint64_t count{0};  // of numbers in the present chunk
  uint64_t chunks{0};  // that have ended
  std::vector<T> sums;  // [level] is of 2**level chunks, if ``chunks`` has this bit
};

template <typename T, uint64_t kChunkSize>
inline T cascade_sum_combine(const T& number, CascadeSumHelper<T, kChunkSize>* helper) {
  helper->sum = helper->sum + number;
  if (helper->has_chunks && ++helper->count == kChunkSize) helper->carry();
  return helper->sum;
}

template <typename T, uint64_t kChunkSize>
inline T cascade_sum_combine(
    const T& numbers, int64_t tail, CascadeSumHelper<T, kChunkSize>* helper) {
  helper->sum = T::set(helper->sum, helper->sum + numbers, tail);
  if (helper->has_chunks && ++helper->count == kChunkSize) helper->carry();
  return helper->sum;
}

template <typename T, uint64_t kChunkSize>
inline T cascade_sum_final(CascadeSumHelper<T, kChunkSize>* helper) {
  T result = helper->sum;
  for (uint64_t level = 0; level < helper->sums.size(); ++level)
    if (helper->chunks >> level & 1) result = helper->sums[level] + result;
  return result;
}

}  // namespace autosched
