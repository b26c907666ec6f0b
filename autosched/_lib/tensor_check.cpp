// Compare tensors with facts that were recorded of earlier ones: see native_check.py, which builds it.
//
// No tensor is kept. An object is taken for a tensor only if its class is that of a recorded one. No
// code of Python is called.

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <c10/core/TensorImpl.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <c10/core/impl/COWDeleter.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <vector>

namespace {

enum Flags { FIXED = 1, BARE = 2, WITHOUT_GRAD = 4 };

// What a tensor of Python consists of: see THPVariable in torch/csrc/autograd/python_variable.h,
// which takes long to compile.
struct Tensor {
  PyObject_HEAD
  const c10::TensorImpl* impl;
  PyObject* hooks;
  PyObject* later_hooks;
};

// Gives access to protected members, and has none of its own.
struct Fields : c10::TensorImpl {
  // Whether all that is compared are fields, and not results of functions.
  bool are_true() const {
    return !matches_policy(SizesStridesPolicy::CustomStrides) && !device_policy_ && !layout_policy_;
  }
  std::optional<c10::Device> device_field() const { return device_opt_; }
};

// What many tensors have in common.
struct Kind {
  PyTypeObject* type;
  c10::DispatchKeySet keys;
  caffe2::TypeMeta dtype;
  std::optional<c10::Device> device;
  bool requires_grad;
  int flags;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  bool operator==(const Kind&) const = default;
};

struct Facts {
  PyObject* name;
  size_t kind;
  const void* address;
};

struct Record {
  std::vector<Kind> kinds;
  std::vector<Facts> facts;
};

const Fields& fields_of(const c10::TensorImpl* impl) {
  return *static_cast<const Fields*>(impl);
}

bool has_no_hooks(PyObject* hooks) {
  return hooks == nullptr || hooks == Py_None ||
      (PyDict_Check(hooks) && PyDict_GET_SIZE(hooks) == 0);
}

bool has_no_grad(const c10::TensorImpl* impl) {
  const auto* meta = impl->autograd_meta();
  if (meta == nullptr) {
    return true;
  }
  // at::Tensor, which is incomplete here, is a pointer.
  const auto* grad = *reinterpret_cast<const c10::TensorImpl* const*>(&meta->grad());
  return grad == c10::UndefinedTensorImpl::singleton();
}

// Return the address that ``data_ptr`` returns; nothing where that would copy the memory.
std::optional<const void*> address_of(const c10::TensorImpl* impl) {
  const auto& storage = impl->unsafe_storage();
  if (!storage || storage.data_ptr().get_deleter() == c10::impl::cow::cow_deleter) {
    return std::nullopt;
  }
  return impl->data();
}

bool is_alike(PyObject* item, const Kind& kind, const void* address) {
  if (Py_TYPE(item) != kind.type) {
    return false;
  }
  const auto* tensor = reinterpret_cast<const Tensor*>(item);
  const auto* impl = tensor->impl;
  if (impl == nullptr || !fields_of(impl).are_true() || impl->key_set() != kind.keys ||
      impl->dtype() != kind.dtype || fields_of(impl).device_field() != kind.device ||
      impl->sizes() != c10::IntArrayRef(kind.sizes) ||
      impl->strides() != c10::IntArrayRef(kind.strides) ||
      impl->requires_grad() != kind.requires_grad) {
    return false;
  }
  if ((kind.flags & BARE) && !(has_no_hooks(tensor->hooks) && has_no_hooks(tensor->later_hooks))) {
    return false;
  }
  if ((kind.flags & WITHOUT_GRAD) && !has_no_grad(impl)) {
    return false;
  }
  return !(kind.flags & FIXED) || address_of(impl) == address;
}

bool is_named(PyObject* key, PyObject* name) {
  return key == name || (PyUnicode_CheckExact(key) && PyUnicode_Compare(key, name) == 0);
}

bool are_alike(PyObject* found, const Record& record) {
  const auto count = static_cast<Py_ssize_t>(record.facts.size());
  if (!PyDict_CheckExact(found) || PyDict_Size(found) != count) {
    return false;
  }
  PyObject *name, *item;
  Py_ssize_t position = 0;
  for (const auto& facts : record.facts) {
    if (!PyDict_Next(found, &position, &name, &item) || !is_named(name, facts.name) ||
        !is_alike(item, record.kinds[facts.kind], facts.address)) {
      return false;
    }
  }
  return true;
}

const char* const CAPSULE = "autosched.tensor_check";

// Garbage collection follows ``self``: a capsule, and the names and classes that the record mentions.
PyObject* check(PyObject* self, PyObject* found) {
  PyObject* capsule = PyTuple_GET_ITEM(self, 0);
  const auto* record = static_cast<const Record*>(PyCapsule_GetPointer(capsule, CAPSULE));
  bool result = false;
  try {
    result = are_alike(found, *record);
  } catch (...) {  // a storage that refuses access
  }
  return PyBool_FromLong(result);
}

PyMethodDef CHECK = {"is_alike", check, METH_O, "Return whether tensors are like the recorded."};

// Add the facts of a tensor; return whether they can be compared.
bool add(Record& record, PyObject* name, PyObject* item, int flags) {
  const auto* impl = reinterpret_cast<const Tensor*>(item)->impl;
  if (!PyUnicode_Check(name) || !fields_of(impl).are_true()) {
    return false;
  }
  const auto address = flags & FIXED ? address_of(impl) : nullptr;
  if (!address) {
    return false;
  }
  auto kind = Kind{
      Py_TYPE(item), impl->key_set(), impl->dtype(), fields_of(impl).device_field(),
      impl->requires_grad(), flags, impl->sizes().vec(), impl->strides().vec()};
  auto& kinds = record.kinds;
  const auto at = static_cast<size_t>(std::find(kinds.begin(), kinds.end(), kind) - kinds.begin());
  if (at == kinds.size()) {
    kinds.push_back(std::move(kind));
  }
  record.facts.push_back({name, at, *address});
  return true;
}

// Take a tuple of names, one of classes, one of tensors, and bytes of flags, all of one length.
PyObject* recorded(PyObject*, PyObject* args) {
  PyObject *names, *types, *tensors;
  const char* flags;
  Py_ssize_t count;
  if (!PyArg_ParseTuple(
          args, "O!O!O!y#", &PyTuple_Type, &names, &PyTuple_Type, &types, &PyTuple_Type, &tensors,
          &flags, &count)) {
    return nullptr;
  }
  auto record = std::make_unique<Record>();
  try {
    for (Py_ssize_t i = 0; i < count; ++i) {
      if (!add(*record, PyTuple_GET_ITEM(names, i), PyTuple_GET_ITEM(tensors, i), flags[i])) {
        Py_RETURN_NONE;
      }
    }
  } catch (...) {  // a storage that refuses access
    Py_RETURN_NONE;
  }
  PyObject* capsule = PyCapsule_New(record.get(), CAPSULE, [](PyObject* self) {
    delete static_cast<Record*>(PyCapsule_GetPointer(self, CAPSULE));
  });
  if (capsule == nullptr) {
    return nullptr;
  }
  record.release();
  PyObject* kept = Py_BuildValue("NOO", capsule, names, types);
  PyObject* function = kept == nullptr ? nullptr : PyCFunction_New(&CHECK, kept);
  Py_XDECREF(kept);
  return function;
}

// Return what is read of a tensor: addresses of its TensorImpl, its hooks, and its first element.
PyObject* fields(PyObject*, PyObject* item) {
  const auto* tensor = reinterpret_cast<const Tensor*>(item);
  const void* address = nullptr;
  try {
    if (fields_of(tensor->impl).are_true()) {
      address = address_of(tensor->impl).value_or(nullptr);
    }
  } catch (...) {  // a storage that refuses access
  }
  return Py_BuildValue(
      "KKKK", reinterpret_cast<uintptr_t>(tensor->impl),
      reinterpret_cast<uintptr_t>(tensor->hooks),
      reinterpret_cast<uintptr_t>(tensor->later_hooks), reinterpret_cast<uintptr_t>(address));
}

PyMethodDef METHODS[] = {
    {"recorded", recorded, METH_VARARGS, "Return a check for tensors like these, or None."},
    {"fields", fields, METH_O, "Return what is read of a tensor."},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "tensor_check", nullptr, -1, METHODS};

}  // namespace

PyMODINIT_FUNC PyInit_tensor_check() {
  return PyModule_Create(&MODULE);
}
