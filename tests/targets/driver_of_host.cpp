// A CUDA driver whose only GPU is the memory of this process: a launch copies what its arguments hold to where the first one
// points. It declares what it has by cuda.h, so that callers with another idea of a parameter fail.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include <cuda.h>

extern "C" {
static const size_t SIZES[] = {8, 4, 128, 8, 4};  // of the parameters
static int dynamic_smem = 0, cluster = 0;

CUresult cuInit(unsigned flags) { return flags ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS; }
CUresult cuGetErrorName(CUresult, const char** text) { return *text = "CUDA_ERROR_OF_THE_TEST", CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult, const char** text) { return *text = "as asked for", CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int* version) { return *version = 13010, CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice* device, int ordinal) { return *device = 7 + ordinal, CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int* count) { return *count = 2, CUDA_SUCCESS; }
CUresult cuDeviceGetName(char* name, int size, CUdevice device) { return std::snprintf(name, size, "GPU %d", device), CUDA_SUCCESS; }
CUresult cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice device) {
    for (int i = 0; i < 16; ++i) uuid->bytes[i] = static_cast<char>(i == 1 ? 0 : device + 16 * i);
    return CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int* found, CUdevice_attribute which, CUdevice device) {
    *found = which == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR ? 9
        : which == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR    ? 0
        : which == CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN ? 100000 : 1000 + static_cast<int>(which);
    return device == 7 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}
CUresult cuDeviceGetPCIBusId(char* text, int size, CUdevice) { return std::snprintf(text, size, "0000:01:00.0"), CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice) { return *context = reinterpret_cast<CUcontext>(1ull << 40), CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext context) { return context == reinterpret_cast<CUcontext>(1ull << 40) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT; }
CUresult cuCtxSynchronize() { return CUDA_SUCCESS; }
CUresult cuMemAlloc_v2(CUdeviceptr* address, size_t size) { return *address = reinterpret_cast<CUdeviceptr>(std::aligned_alloc(512, (size + 511) / 512 * 512)), CUDA_SUCCESS; }
CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void* from, size_t size) { return std::memcpy(reinterpret_cast<void*>(to), from, size), CUDA_SUCCESS; }
CUresult cuMemcpyDtoH_v2(void* to, CUdeviceptr from, size_t size) { return std::memcpy(to, reinterpret_cast<void*>(from), size), CUDA_SUCCESS; }
CUresult cuModuleLoadData(CUmodule* module, const void* image) {
    if (std::strcmp(static_cast<const char*>(image), "code of the test")) return CUDA_ERROR_INVALID_IMAGE;
    return *module = reinterpret_cast<CUmodule>(3ull << 40), CUDA_SUCCESS;
}
CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }
CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
    if (module != reinterpret_cast<CUmodule>(3ull << 40) || std::strcmp(name, "entry")) return CUDA_ERROR_NOT_FOUND;
    return *function = reinterpret_cast<CUfunction>(5ull << 40), CUDA_SUCCESS;
}
CUresult cuFuncGetAttribute(int* found, CUfunction_attribute which, CUfunction) { return *found = which == CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES ? 1024 : -1, CUDA_SUCCESS; }
CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute which, int value) {
    (which == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES ? dynamic_smem : cluster) = value;
    return CUDA_SUCCESS;
}
CUresult cuFuncGetParamInfo(CUfunction, size_t number, size_t* offset, size_t* size) {
    if (number >= 5) return CUDA_ERROR_INVALID_VALUE;
    return *offset = 0, *size = SIZES[number], CUDA_SUCCESS;
}
CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** arguments, void**) {
    if (function != reinterpret_cast<CUfunction>(5ull << 40) || config->gridDimX != 3 || config->blockDimX != 64) return CUDA_ERROR_INVALID_VALUE;
    if (config->sharedMemBytes != 60000 || dynamic_smem != 60000) return CUDA_ERROR_INVALID_VALUE;
    if (reinterpret_cast<unsigned long long>(arguments[2]) % 64) return CUDA_ERROR_MISALIGNED_ADDRESS;
    char* to = *static_cast<char**>(arguments[0]);
    for (int i = 0; i < 5; to += SIZES[i++]) std::memcpy(to, arguments[i], SIZES[i]);
    return CUDA_SUCCESS;
}
}
