// Products of a warpgroup, which run while its threads go on. PTX ISA, sections on wgmma: register fragments, matrix descriptors, and the
// canonical layouts of operands swizzled by 128 bytes.
//
// Each warp computes its own 16 of the 64 rows, at any time between the start and the wait, in the order in which it started them; what
// a product reads of shared memory and registers is what lies there then.
#pragma once

namespace host {

// Where an operand lies, as its descriptor says.
struct Operand {
    u64 at, along_bytes, group_bytes; // of the first number; between panels; between groups of eight rows
    explicit Operand(u64 descriptor)
        : at((descriptor & 0x3fff) << 4), along_bytes((descriptor >> 16 & 0x3fff) << 4), group_bytes((descriptor >> 32 & 0x3fff) << 4) {
        if (descriptor >> 62 != 1) machine.fail("a matrix that is not swizzled by 128 bytes");
        if (descriptor >> 49 & 7) machine.fail("a matrix at an offset from its swizzle's pattern");
    }
    // Of a row that lies along what is summed over.
    u64 along(u32 row, u32 k) const { return swizzled(at + row / 8 * group_bytes + row % 8 * 128 + k * 2); }
    // Of a row that lies across it.
    u64 across(u32 k, u32 column) const { return swizzled(at + column / 64 * along_bytes + k / 8 * group_bytes + k % 8 * 128 + column % 64 * 2); }
    static u64 swizzled(u64 address) { return (address ^ (address >> 7 & 7) << 4) - SHARED_BASE; }
};

static float read_number(u64 place) {
    u16 bits;
    memcpy(&bits, machine.shared.memory + place, 2);
    return widen(bits);
}
// Chunks of eight numbers, which is what swizzles leave together.
static void note_read(u64 place, u32 warp) {
    machine.check(machine.shared.memory + place, 16, 16, "a product");
    machine.shadow.check_fenced(place, 16);
    machine.shadow.read(place, 16, {Who::WHOLE_WARP, warp});
}

static void compute(const Products::Lanes& lanes, u32 warp) {
    static float a[16][16], b[16][256], sum[16][256]; // as many columns as an instruction has
    const Product& first = lanes[0];
    const Operand operand_b(first.b);
    const bool across = first.a_registers; // the only ones that dev.cuh has
    for (u32 k = 0; k < 16; k += across ? 1 : 8)
        for (u32 column = 0; column < first.columns; column += across ? 8 : 1)
            note_read(across ? operand_b.across(k, column) : operand_b.along(column, k), warp);
    for (u32 k = 0; k < 16; k++)
        for (u32 column = 0; column < first.columns; column++)
            b[k][column] = read_number(across ? operand_b.across(k, column) : operand_b.along(column, k));
    if (first.a_registers) {
        for (u32 lane = 0; lane < 32; lane++)
            for (u32 i = 0; i < 8; i++) {
                const u32 bits = lanes[lane].a_registers[i / 2] >> i % 2 * 16;
                a[lane / 4 + i / 2 % 2 * 8][lane % 4 * 2 + i % 2 + i / 4 * 8] = widen((u16)bits);
            }
    } else {
        const Operand operand_a(first.a);
        // Nothing says that a warp reads its own rows only.
        for (u32 row = 0; row < 64; row++)
            for (u32 k = 0; k < 16; k += 8) note_read(operand_a.along(row, k), warp);
        for (u32 row = 0; row < 16; row++)
            for (u32 k = 0; k < 16; k++) a[row][k] = read_number(operand_a.along(warp % 4 * 16 + row, k));
    }
    auto number = [&](u32 lane, u32 i) -> float& { return sum[lane / 4 + i / 2 % 2 * 8][i / 4 * 8 + lane % 4 * 2 + i % 2]; };
    for (u32 lane = 0; lane < 32; lane++)
        for (u32 i = 0; i < first.columns / 2; i++) number(lane, i) = first.add ? lanes[lane].sum[i] : 0.f;
    for (u32 row = 0; row < 16; row++)
        for (u32 k = 0; k < 16; k++)
            for (u32 column = 0; column < first.columns; column++) sum[row][column] += a[row][k] * b[k][column];
    for (u32 lane = 0; lane < 32; lane++)
        for (u32 i = 0; i < first.columns / 2; i++) lanes[lane].sum[i] = number(lane, i);
}

static void compute_all(std::vector<Products::Lanes>& products, u32 warp) {
    for (auto& lanes : products) compute(lanes, warp);
    products.clear();
}

static void start_product(Lane* warp) {
    const u32 index = warp->index / 32;
    Products& products = machine.products[index];
    Products::Lanes lanes;
    for (u32 i = 0; i < 32; i++) lanes.push_back(*(const Product*)warp[i].operands);
    for (auto& lane : lanes)
        if (lane.a != lanes[0].a || lane.b != lanes[0].b || lane.add != lanes[0].add || lane.columns != lanes[0].columns)
            return (void)machine.refuse("a product of which lanes say different things");
    if (!products.fenced) return (void)machine.refuse("a product with no fence before it in its group");
    products.open.push_back(std::move(lanes));
    if (machine.copy_mode == EARLY || (machine.copy_mode == RANDOM && (machine.random.next() & 1))) {
        for (auto& group : products.groups) compute_all(group, index);
        compute_all(products.open, index);
    }
}
static void commit_products(Lane* warp) {
    Products& products = machine.products[warp->index / 32];
    products.groups.push_back(std::move(products.open));
    products.open.clear();
    products.fenced = false;
}
static void wait_for_products(Lane* warp) {
    Products& products = machine.products[warp->index / 32];
    const u32 left = *(const u32*)warp->operands;
    // No wait is for products whose group has not ended.
    while (products.groups.size() > left) {
        compute_all(products.groups.front(), warp->index / 32);
        products.groups.erase(products.groups.begin());
    }
}

} // namespace host
