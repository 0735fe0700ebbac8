// A device that says it is CUDA and is the processor: its tensors' memory is the processor's, and every operation on
// them is done by the processor's kernel. What runs here takes the branches that it takes on a GPU, with values, and is
// refused where tensors of two devices meet. cuDNN, streams, graphs and time are no part of it.
//
// Operations whose results a host would wait for are counted: ghostclip_waits().

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <optional>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

namespace {

using at::Tensor;
using c10::IValue;
using Maybe = std::optional<Tensor>;

const c10::Device CUDA(c10::kCUDA, 0), CPU(c10::kCPU);

// The host waits for these, for what they return is a number, or tensors whose size is in the values.
constexpr std::array<std::string_view, 7> WAITED_FOR{
    "aten::_local_scalar_dense", "aten::equal",    "aten::is_nonzero",         "aten::nonzero",
    "aten::masked_select",       "aten::_unique2", "aten::unique_consecutive",
};

// These take tensors of the processor beside CUDA's, as indices or lengths.
constexpr std::array<std::string_view, 5> TAKE_BOTH{
    "aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index", "aten::_pack_padded_sequence",
};

std::atomic<long> waits{0};

template <size_t n>
bool among(const std::array<std::string_view, n>& names, std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

// One device with one stream, in which all is done as soon as it is asked for.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::Device exchangeDevice(c10::Device) const override { return CUDA; }
  c10::Device getDevice() const override { return CUDA; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return c10::Stream(c10::Stream::DEFAULT, CUDA); }
  c10::Stream getDefaultStream(c10::Device) const override { return getStream(CUDA); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  int getNumGPUs() const override { return 1; }
  void deviceSynchronize(c10::DeviceIndex) const override {}
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
};

// The same memory, said to be another device's.
c10::Storage seen_from(const c10::Storage& storage, c10::Device device) {
  auto* holder = new c10::Storage(storage);
  auto let_go = [](void* held) { delete static_cast<c10::Storage*>(held); };
  c10::DataPtr memory(const_cast<void*>(storage.data()), holder, let_go, device);
  return c10::Storage(
      c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(memory), c10::GetAllocator(c10::kCPU), true);
}

// A tensor with the shape, strides and type of ``like`` on that storage.
Tensor on(const c10::Storage& storage, const Tensor& like) {
  auto key = storage.device().is_cpu() ? c10::DispatchKey::CPU : c10::DispatchKey::CUDA;
  auto found = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), c10::DispatchKeySet(key), like.dtype());
  found.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  found._set_conj(like.is_conj());
  found._set_neg(like.is_neg());
  return found;
}

// One operation's tensors, and their twins on the processor.
class Call {
 public:
  Tensor down(const Tensor& given) {
    if (!given.defined() || !given.is_cuda()) {
      if (given.defined() && given.dim() > 0) foreign_ = given;
      return given;
    }
    c10::Storage storage;
    for (auto& [seen, twin] : pairs_) {
      if (seen.is_same(given)) return twin;
      if (seen.storage().is_alias_of(given.storage())) storage = twin.storage();
    }
    pairs_.emplace_back(given, on(storage ? storage : seen_from(given.storage(), CPU), given));
    return pairs_.back().second;
  }

  // A tensor that came in is itself again, a view of it a view, and a new one is new.
  Tensor up(const Tensor& found) {
    if (!found.defined() || !found.is_cpu()) return found;
    for (auto& [seen, twin] : pairs_)
      if (twin.is_same(found)) return seen;
    for (auto& [seen, twin] : pairs_)
      if (twin.storage().is_alias_of(found.storage())) return on(seen.storage(), found);
    return on(seen_from(found.storage(), CUDA), found);
  }

  // What the operation resized or gave other memory, as it does for out=.
  void settle() {
    for (auto& [seen, twin] : pairs_) {
      auto* tensor = seen.unsafeGetTensorImpl();
      if (twin.storage().data() != seen.storage().data())
        tensor->set_storage_keep_dtype(seen_from(twin.storage(), CUDA));
      if (twin.sizes() != seen.sizes() || twin.strides() != seen.strides())
        tensor->set_sizes_and_strides(twin.sizes(), twin.strides(), twin.storage_offset());
    }
  }

  const Maybe& foreign() const { return foreign_; }

 private:
  std::vector<std::pair<Tensor, Tensor>> pairs_;
  Maybe foreign_;
};

template <class F>
IValue each_tensor(const IValue& value, const F& change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isDevice() && value.toDevice().is_cuda()) return CPU;
  if (value.isTensorList()) {
    std::vector<Tensor> changed;
    for (const Tensor& one : value.toTensorVector()) changed.push_back(change(one));
    return changed;
  }
  if (value.isList()) {
    auto list = value.toList();
    c10::impl::GenericList changed(list.elementType());
    for (size_t i = 0; i < list.size(); ++i) changed.push_back(each_tensor(list.get(i), change));
    return changed;
  }
  return value;
}

void by_the_processor(const c10::OperatorHandle& operation, c10::Stack* stack) {
  const auto& schema = operation.schema();
  Call call;
  waits += among(WAITED_FOR, schema.name());
  for (size_t i = stack->size() - schema.arguments().size(); i < stack->size(); ++i)
    (*stack)[i] = each_tensor((*stack)[i], [&](const Tensor& given) { return call.down(given); });
  TORCH_CHECK(
      !call.foreign() || among(TAKE_BOTH, schema.name()), schema.name(), " got tensors of CUDA and one of the processor, ",
      call.foreign()->sizes());
  {
    at::AutoDispatchBelowADInplaceOrView below;
    operation.callBoxed(*stack);
  }
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i)
    (*stack)[i] = each_tensor((*stack)[i], [&](const Tensor& found) { return call.up(found); });
  call.settle();
}

Tensor empty(
    c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  auto made = at::empty(C10_AS_INTARRAYREF_SLOW(size), at::TensorOptions(CPU).dtype(dtype), format);
  return on(seen_from(made.storage(), CUDA), made);
}

Tensor empty_strided(
    c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  auto made = at::empty_strided(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), at::TensorOptions(CPU).dtype(dtype));
  return on(seen_from(made.storage(), CUDA), made);
}

Tensor& copy_(Tensor& to, const Tensor& from, bool) {
  Call call;
  waits += to.is_cpu() && from.is_cuda();
  call.down(to).copy_(call.down(from));
  return to;
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool) {
  Tensor there = to;
  return copy_(there, from, false);
}

// CUDA's cells are operations that the processor doesn't have.

Tensor plus(const Tensor& one, const Maybe& other) { return other && other->defined() ? one + *other : one; }

std::tuple<Tensor, Tensor, Tensor> lstm_cell(
    const Tensor& at_input, const Tensor& at_hidden, const Tensor& cell, const Maybe& bias, const Maybe& other_bias) {
  auto part = plus(plus(at_input + at_hidden, bias), other_bias).chunk(4, 1);
  auto i = part[0].sigmoid(), f = part[1].sigmoid(), g = part[2].tanh(), o = part[3].sigmoid();
  auto after = f * cell + i * g;
  return {o * after.tanh(), after, at::cat({i, f, g, o}, 1)};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_back(
    const Maybe& at_hidden, const Maybe& at_cell, const Tensor& cell, const Tensor& after, const Tensor& gates,
    bool has_bias) {
  auto part = gates.chunk(4, 1);
  auto i = part[0], f = part[1], g = part[2], o = part[3], bent = after.tanh();
  auto hidden = at_hidden && at_hidden->defined() ? *at_hidden : at::zeros_like(after);
  auto inner = plus(hidden * o * (1 - bent * bent), at_cell);
  auto found = at::cat(
      {inner * g * i * (1 - i), inner * cell * f * (1 - f), inner * i * (1 - g * g), hidden * bent * o * (1 - o)}, 1);
  return {found, inner * f, has_bias ? found.sum(0) : Tensor()};
}

std::tuple<Tensor, Tensor> gru_cell(
    const Tensor& at_input, const Tensor& at_hidden, const Tensor& hidden, const Maybe& bias, const Maybe& other_bias) {
  auto in = plus(at_input, bias).chunk(3, 1), held = plus(at_hidden, other_bias).chunk(3, 1);
  auto r = (in[0] + held[0]).sigmoid(), z = (in[1] + held[1]).sigmoid(), n = (in[2] + r * held[2]).tanh();
  return {(hidden - n) * z + n, at::cat({r, z, n, hidden, held[2]}, 1)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_back(
    const Tensor& at_hidden, const Tensor& kept, bool has_bias) {
  auto part = kept.chunk(5, 1);
  auto r = part[0], z = part[1], n = part[2], hidden = part[3], held = part[4];
  auto at_n = at_hidden * (1 - z) * (1 - n * n), at_z = at_hidden * (hidden - n) * z * (1 - z);
  auto at_r = at_n * held * r * (1 - r);
  auto in = at::cat({at_r, at_z, at_n}, 1), out = at::cat({at_r, at_z, at_n * r}, 1);
  return {in, out, at_hidden * z, has_bias ? in.sum(0) : Tensor(), has_bias ? out.sum(0) : Tensor()};
}

Guard guard;
c10::impl::DeviceGuardImplRegistrar registrar(c10::kCUDA, &guard);

}  // namespace

namespace at {
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, Hooks);
}

TORCH_LIBRARY_IMPL(_, CUDA, all) { all.fallback(torch::CppFunction::makeFromBoxedFunction<&by_the_processor>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, own) {
  own.impl("empty.memory_format", &empty);
  own.impl("empty_strided", &empty_strided);
  own.impl("copy_", &copy_);
  own.impl("_copy_from", &copy_from);
  own.impl("_thnn_fused_lstm_cell", &lstm_cell);
  own.impl("_thnn_fused_lstm_cell_backward_impl", &lstm_cell_back);
  own.impl("_thnn_fused_gru_cell", &gru_cell);
  own.impl("_thnn_fused_gru_cell_backward", &gru_cell_back);
  // These choose a kernel by the device before anything else.
  for (const char* name : {"convolution", "convolution_backward"})
    own.impl(name, torch::CppFunction::makeFromBoxedFunction<&by_the_processor>());
}

extern "C" long ghostclip_waits() { return waits.exchange(0); }
