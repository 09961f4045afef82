// Whether the memory of tensors may be handed to a kernel, or only PyTorch can do right by them: _tensors.py in C++.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <initializer_list>

namespace {

const char* const AUTOCAST = "autocast is enabled";

inline bool plain_memory(const at::Tensor& t) {
    if (!t.has_storage() || t.numel() == 0) return false;
    // A view into a released storage has an address, too: its offset from nothing.
    return t.storage().nbytes() > static_cast<size_t>(t.storage_offset()) * t.itemsize();
}

// What PyTorch's dispatcher would have to do beside calling a kernel and recording gradients; null: nothing.
inline const char* wanted_of_dispatcher(c10::DispatchKeySet keys) {
    static const c10::DispatchKeySet passed =
        c10::autograd_dispatch_keyset | c10::DispatchKeySet({c10::DispatchKey::ADInplaceOrView, c10::DispatchKey::BackendSelect});
    const c10::impl::LocalDispatchKeySet local = c10::impl::tls_local_dispatch_key_set();
    const c10::DispatchKeySet left = ((keys | local.included_) - local.excluded_) - passed;
    switch (const c10::DispatchKey key = left.highestPriorityTypeId(); key) {
        case c10::DispatchKey::CPU:
        case c10::DispatchKey::CUDA:
            return nullptr;
        case c10::DispatchKey::AutocastCPU:
        case c10::DispatchKey::AutocastCUDA:
            return AUTOCAST;
        case c10::DispatchKey::Negative:
        case c10::DispatchKey::Conjugate:
            return "an argument is a view that negates what it reads";
        case c10::DispatchKey::ZeroTensor:
            return "an argument holds no memory (it is a tensor of zeros that was never filled in)";
        case c10::DispatchKey::Tracer:
            return "torch.jit.trace must see the operation";
        case c10::DispatchKey::Python:
        case c10::DispatchKey::PythonDispatcher:
        case c10::DispatchKey::PythonTLSSnapshot:
        case c10::DispatchKey::PreDispatch:
            return "a torch dispatch mode is active";
        case c10::DispatchKey::FuncTorchBatched:
        case c10::DispatchKey::FuncTorchGradWrapper:
        case c10::DispatchKey::FuncTorchVmapMode:
        case c10::DispatchKey::FuncTorchDynamicLayerFrontMode:
        case c10::DispatchKey::FuncTorchDynamicLayerBackMode:
            return "a transform of torch.func is active";
        default:
            return "an argument is not laid out as a plain array, or on a device that nothing was tuned for";
    }
}

// Whether forward-mode differentiation follows a tensor.
inline bool dual(const at::Tensor* t) { return t && t->_fw_grad(0).defined(); }

inline c10::DispatchKeySet keys_of(std::initializer_list<const at::Tensor*> tensors) {
    c10::DispatchKeySet keys;
    for (const at::Tensor* t : tensors)
        if (t) keys = keys | t->key_set();
    return keys;
}

// As addresses() of _tensors.py: why these must not be handed to a kernel, or null. Null pointers are left out; the first
// is not one.
inline const char* unfit(std::initializer_list<const at::Tensor*> tensors) {
    const at::Tensor& first = **tensors.begin();
    if (const char* reason = wanted_of_dispatcher(keys_of(tensors))) return reason;
    for (const at::Tensor* t : tensors) {
        if (!t) continue;
        if (t->scalar_type() != first.scalar_type()) return "the arguments have different dtypes";
        if (t->device() != first.device()) return "the arguments are on different devices";
        if (dual(t)) return "forward-mode differentiation is active";
        if (!plain_memory(*t)) return "an argument holds no memory (it is empty, released or on meta)";
    }
    return nullptr;
}

inline bool recorded(std::initializer_list<const at::Tensor*> tensors) {
    if (!c10::GradMode::is_enabled()) return false;
    for (const at::Tensor* t : tensors)
        if (t && t->requires_grad()) return true;
    return false;
}

// Whether a transform of torch.func is being applied, at whatever level.
inline bool under_transform() {
    return c10::impl::tls_local_dispatch_key_set().included_.has(c10::DispatchKey::FuncTorchDynamicLayerFrontMode);
}

}  // namespace
