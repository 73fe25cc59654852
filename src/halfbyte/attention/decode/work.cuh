// How the work of a decode step is cut up; shared by the plan, the chunks and the merge.
//
// A piece is one sequence with one group of COLS query columns (heads of a KV head's group x query
// tokens). Pieces lie one after the other on a line of positions, a position being a tile of TILE
// tokens, and the line is cut into units of `span` positions. One warp works on one unit for one KV
// head. Two ways to lay the line:
//
//   aligned     every piece begins a new unit: a warp has one piece, the last chunk may be short
//   continuous  pieces follow each other, each after `overhead` positions that stand for the time
//               it takes to begin one; a unit may hold the end of one piece and the next ones
//
// Unit u's share of piece i is row u + i of the partial results: both only grow along the line, so
// no two shares meet in a row, and the rows of one piece are neighbours.

#pragma once
#include "kernels/runtime/basics.cuh"

#define LOG2E 1.4426950408889634f
#define NEG_INF (-__int_as_float(0x7f800000))

struct Piece {
  int begin;       // its first position on the line
  int seq;
  int col_tile;    // which COLS columns
  int first_tile;  // the window may hide tiles before it
  int num_tiles;
  int length;      // tokens in the cache
  int q_begin;     // its sequence's first query token
  int queries;     // its sequence's query tokens
};

// The plan is one int32 array: this header, the pieces of every query token's sequence, the units, and
// the pieces.
struct PlanHeader {
  int span, units, overhead, pieces;
};

// The pieces of a sequence lie side by side and are alike, so that one look tells where the parts of a
// token's rows are.
struct TokenPieces {
  int first;      // its index
  int begin;      // its first position on the line
  int cost;       // positions from one to the next
  int num_tiles;  // of each
  int q_begin;    // the sequence's first query token
};

// A unit begins in this piece; a copy of it, so that a warp knows its work after one look.
struct Unit {
  Piece piece;
  int index;  // of the piece
};

struct PlanView {
  const int* data;
  int units_offset, pieces_offset;  // in ints, multiples of 8

  __device__ __forceinline__ PlanHeader header() const {
    const int4 x = *(const int4*)data;
    return {x.x, x.y, x.z, x.w};
  }
  __device__ __forceinline__ TokenPieces pieces_of(int token) const {
    const int4* x = (const int4*)(data + 4) + 2 * token;
    const int4 a = x[0];
    return {a.x, a.y, a.z, a.w, x[1].x};
  }
  __device__ __forceinline__ Piece piece(int i) const {
    const int4* x = (const int4*)(data + pieces_offset) + 2 * i;
    const int4 a = x[0], b = x[1];
    return {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
  }
  __device__ __forceinline__ Unit unit(int u) const {
    const int4* x = (const int4*)(data + units_offset) + 3 * u;
    const int4 a = x[0], b = x[1];
    return {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}, x[2].x};
  }
};
