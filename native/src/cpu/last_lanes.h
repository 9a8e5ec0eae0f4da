// What the AVX2 and the AVX-512 kernels have in common: the last steps, on 256 bits and fewer. Each includes this in
// its own anonymous namespace, for the reason that kernels_impl.h gives.

void group_offsets(const int8_t* q, int16_t* offsets) {
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(q));
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(8), bytes);  // k % 4 < 2 and the others take turns
    __m128i sum = _mm_add_epi16(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
    sum = _mm_add_epi16(sum, _mm_shuffle_epi32(sum, 0x4E));
    sum = _mm_add_epi16(sum, _mm_shuffle_epi32(sum, 0xB1));
    const int32_t both = _mm_cvtsi128_si32(_mm_sub_epi16(_mm_setzero_si128(), sum));
    __builtin_memcpy(offsets, &both, 4);
}

// The tree of kernels_impl.h, from its second level on.
float sum_of_eight(__m256 eight) {
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

float highest_of_eight(__m256 eight) {
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
