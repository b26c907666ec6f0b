// Sums of numbers in chunks, and of chunks in blocks: what Inductor's kernels call by these names.

#include <cstdint>

namespace autosched {

// A compiler keeps the members in registers: no function takes their addresses, and none is called.
template <typename T, uint64_t kChunkSize>
struct CascadeSumHelper {
  static_assert((kChunkSize & (kChunkSize - 1)) == 0, "is a power of two");

  explicit CascadeSumHelper(uint64_t numbers) : has_chunks(numbers > kChunkSize) {}

  void end_number() {
    if (has_chunks && (++count & (kChunkSize - 1)) == 0) {
      block = block + chunk;
      chunk = T(0);
      if ((count & (kChunkSize * kChunkSize - 1)) == 0) {
        total = total + block;
        block = T(0);
      }
    }
  }

  T chunk{0};  // the sum of numbers that are in no chunk yet
  T block{0};  // the sum of chunks that are in no block yet
  T total{0};  // the sum of blocks
  uint64_t count{0};  // of numbers
  bool has_chunks;
};

template <typename T, uint64_t kChunkSize>
inline T cascade_sum_combine(const T& number, CascadeSumHelper<T, kChunkSize>* helper) {
  helper->chunk = helper->chunk + number;
  helper->end_number();
  return helper->chunk;
}

template <typename T, uint64_t kChunkSize>
inline T cascade_sum_combine(
    const T& numbers, int64_t tail, CascadeSumHelper<T, kChunkSize>* helper) {
  helper->chunk = T::set(helper->chunk, helper->chunk + numbers, tail);
  helper->end_number();
  return helper->chunk;
}

template <typename T, uint64_t kChunkSize>
inline T cascade_sum_final(CascadeSumHelper<T, kChunkSize>* helper) {
  return helper->total + helper->block + helper->chunk;
}

}  // namespace autosched
